-- keep: take over a dead letter of another shard, page after page; doing so again is harmless.
--
-- ARGV[3]  id
-- ARGV[4]  key of its timeline
-- ARGV[5]  reason
-- ARGV[6]  when it was buried, ms
-- ARGV[7]  attempt
-- ARGV[8]  digest id
-- ARGV[9]  number of its first record here, from 0
-- ARGV[10] 1 if these are its last
-- then     records
-- Returns  1, or 0 if the records before these are not here (a failover may forget them): it must be begun again

local moved = tag .. 'moved:' .. ARGV[3]
if call('EXISTS', moved) > 0 then
  return 1 -- it has been here, and may have been taken since
end
local letter, remains = tag .. 'letter:' .. ARGV[3], tag .. 'remains:' .. ARGV[3]
local buried = tonumber(ARGV[6])
local there, start = call('LLEN', remains), tonumber(ARGV[9])
if there < start then
  return 0 -- what came before is gone
end
for index = 11 + math.max(0, there - start), #ARGV do
  call('RPUSH', remains, ARGV[index])
end
local left = math.max(1, buried + LETTER_TTL - now)
call('PEXPIRE', remains, left)
if ARGV[10] == '1' then
  call('HSET', letter, 'key', ARGV[4], 'reason', ARGV[5], 'buried', buried, 'attempt', ARGV[7], 'digest', ARGV[8])
  call('PEXPIRE', letter, left)
  call('ZADD', tag .. 'dead', buried, ARGV[3])
  call('HSET', moved, 'at', now)
  call('PEXPIRE', moved, 24 * HOUR)
end
return 1
