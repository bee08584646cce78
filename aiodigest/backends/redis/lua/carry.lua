-- carry: take over the counters of a shard that is retired, once.
--
-- ARGV[3]  name of the shard
-- then     name, number, ...

local mark = 'carried:' .. ARGV[3]
if not call('HGET', layout, mark) then
  call('HSET', layout, mark, 1)
  for index = 4, #ARGV, 2 do
    call('HINCRBY', layout, ARGV[index], ARGV[index + 1])
  end
end
return 1
