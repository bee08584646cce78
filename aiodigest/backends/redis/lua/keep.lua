-- keep: take over a dead letter of another shard, page after page; doing so again is harmless.
--
-- Flags     begins-namespace, repeatable, replicated
-- Commands  EXISTS HGET HINCRBY HMGET HSET LLEN PEXPIRE RPUSH TIME ZADD
-- Reply     int
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   id (text)
-- ARGV[4]   key (text): of its timeline
-- ARGV[5]   reason (text)
-- ARGV[6]   buried (int, ms): when it became one
-- ARGV[7]   attempt (text)
-- ARGV[8]   digest_id (text)
-- ARGV[9]   limits (text): of its timeline, or ''
-- ARGV[10]  start (int): number of its first record here, from 0
-- ARGV[11]  is_last (flag): these are its last records
-- then      records
-- Returns   1, or 0 if the records before these are not here (a failover may forget them): it must be begun again
--
-- Needs     guard clock tick dead

local id, key, reason, buried = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local attempt, digest_id, limits, start, is_last = ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10]), ARGV[11] == '1'
local DAY = 24 * 3600000

buried = buried + shift

local moved = tag .. 'moved:' .. id
if call('EXISTS', moved) > 0 then
  return 1 -- it has been here, and may have been taken since
end
local letter, remains = tag .. 'letter:' .. id, tag .. 'remains:' .. id
local there = call('LLEN', remains)
if there < start then
  return 0 -- what came before is gone
end
local bytes = is_last and DEAD_LETTER_BASE + #key + #reason or 0
for index = 12 + math.max(0, there - start), #ARGV do
  call('RPUSH', remains, ARGV[index])
  bytes = bytes + #ARGV[index]
end
weigh(id, bytes)
local left = math.max(1, buried + DEAD_LETTER_TTL_MS - now)
call('PEXPIRE', remains, left)
if is_last then
  call('HSET', letter, 'key', key, 'reason', reason, 'buried', buried, 'attempt', attempt, 'digest', digest_id,
    'limits', limits)
  call('PEXPIRE', letter, left)
  call('ZADD', dead, buried, id)
  call('HSET', moved, 'at', now)
  call('PEXPIRE', moved, DAY)
end
return 1
