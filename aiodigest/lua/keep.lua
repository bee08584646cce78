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

local letter, remains = tag .. 'letter:' .. ARGV[3], tag .. 'remains:' .. ARGV[3]
local buried = tonumber(ARGV[6])
if ARGV[9] == '0' then
  call('UNLINK', remains)
end
for index = 11, #ARGV do
  call('RPUSH', remains, ARGV[index])
end
local left = math.max(1, buried + LETTER_TTL - now)
call('PEXPIRE', remains, left)
if ARGV[10] == '1' then
  call('HSET', letter, 'key', ARGV[4], 'reason', ARGV[5], 'buried', buried, 'attempt', ARGV[7], 'digest', ARGV[8])
  call('PEXPIRE', letter, left)
  call('ZADD', tag .. 'dead', buried, ARGV[3])
end
return 1
