-- discard: drop a dead letter.
--
-- Parts     move by hand
-- Commands  EXISTS HDEL HGET HINCRBY HMGET TIME UNLINK ZCARD ZREM
-- Reply     int
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   timing (late)
-- ARGV[3]   id (text)
-- Returns   1 if there was one, else 0
--
-- Needs     guard late dead

local id = ARGV[3]
local existed = call('EXISTS', tag .. 'letter:' .. id, tag .. 'remains:' .. id) -- also what is left of a broken one
drop_letter(id)
return math.min(existed, 1)
