-- letter: show a dead letter and a page of its records.
--
-- Flags     repeatable
-- Parts     look
-- Commands  HGET HMGET LLEN LRANGE TIME
-- Reply     nil | [text, text, number, number, text, text, number, [text...]]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   id (text)
-- ARGV[4]   start (int): the first record, from 0
-- Returns   nothing if there is none; else key, reason, when it became a dead letter (ms), attempt, digest id, limits of
--           its timeline, number of records, and a page of these. Of a broken one the reason is its error, and the
--           number -1
--
-- Needs     guard clock reading

local id, start = ARGV[3], tonumber(ARGV[4])
local letter, remains = tag .. 'letter:' .. id, tag .. 'remains:' .. id
local facts = try('HMGET', letter, 'key', 'reason', 'buried', 'attempt', 'digest', 'limits')
local size = try('LLEN', remains)
local problem = facts.err or type(size) == 'table' and size.err
local key, reason, buried, attempt, digest_id, limits = unpack(facts) -- none, where they cannot be read

local function whole(number)
  return number and #number < 16 and string.find(number, '^%d+$') and tonumber(number)
end

buried = whole(buried) or now
if not problem and not key and size > 0 then
  problem = 'WRONGTYPE the key of its timeline is gone'
elseif not problem and size > LONGEST then
  problem = string.format('WRONGTYPE it has %.0f entries, where aiodigest keeps %d at the most', size, LONGEST)
end
if problem then -- any other error is not the letter's
  local broken = {key or '', problem, buried - shift, whole(attempt) or 0, digest_id or '', limits or '', -1, {}}
  return string.find(problem, 'WRONGTYPE', 1, true) and broken or redis.error_reply(problem)
end
if not key or buried <= now - DEAD_LETTER_TTL_MS then
  return false
end
append_page(remains, start, SLICE)
return {key, reason or '', buried - shift, whole(attempt) or 0, digest_id or '', limits or '', size, entries}
