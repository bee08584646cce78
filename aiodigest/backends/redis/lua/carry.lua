-- carry: take over the counters of a shard that is retired, once.
--
-- Flags     begins-namespace, repeatable, replicated
-- Commands  HGET HINCRBY HMGET HSET TIME
-- Reply     int
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   timing (late)
-- ARGV[3]   shard (text): name of the retired one
-- then      name, number, ...
-- Returns   1
--
-- Needs     guard late

local shard = ARGV[3]
local mark = 'carried:' .. shard
if not call('HGET', layout, mark) then
  call('HSET', layout, mark, 1)
  for index = 4, #ARGV, 2 do
    local stored = call('HGET', layout, ARGV[index]) or '0'
    if string.find(stored, '^%d+$') and #stored < 16 then -- else another program has written it
      call('HINCRBY', layout, ARGV[index], ARGV[index + 1])
    end
  end
end
return 1
