-- letter: a dead letter and a page of its records.
--
-- ARGV[3]  id
-- ARGV[4]  the first record, from 0
-- Returns  nothing if there is none; else key, reason, time of burial (ms), attempt, digest id, number of records, and
--          a page of these

local letter, remains = tag .. 'letter:' .. ARGV[3], tag .. 'remains:' .. ARGV[3]
local facts = call('HMGET', letter, 'key', 'reason', 'buried', 'attempt', 'digest')
if not facts[1] or (tonumber(facts[3]) or now) <= now - LETTER_TTL then
  return false
end
append_page(remains, tonumber(ARGV[4]), SLICE)
return {
  facts[1], facts[2] or '', tonumber(facts[3]) or now, tonumber(facts[4]) or 0, facts[5] or '', call('LLEN', remains), entries,
}
