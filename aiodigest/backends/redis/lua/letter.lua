-- letter: show a dead letter and a page of its records.
--
-- Flags     repeatable
-- Parts     look
-- Commands  HGET HMGET LLEN LRANGE TIME
-- Reply     nil | [text, text, number, number, text, number, [text...]]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   id (text)
-- ARGV[4]   start (int): the first record, from 0
-- Returns   nothing if there is none; else key, reason, when it became a dead letter (ms), attempt, digest id, number of
--           records, and a page of these
--
-- Needs     guard clock reading

local id, start = ARGV[3], tonumber(ARGV[4])
local letter, remains = tag .. 'letter:' .. id, tag .. 'remains:' .. id
local facts = call('HMGET', letter, 'key', 'reason', 'buried', 'attempt', 'digest')
local key, reason, buried, attempt, digest_id = unpack(facts)
buried = tonumber(buried) or now
if not key or buried <= now - DEAD_LETTER_TTL_MS then
  return false
end
append_page(remains, start, SLICE)
return {key, reason or '', buried, tonumber(attempt) or 0, digest_id or '', call('LLEN', remains), entries}
