-- letter: a dead letter and a page of its records.
--
-- ARGV[3]  id
-- ARGV[4]  the first record, from 0
-- Returns  nothing if there is none; else key, reason, time of burial (ms), attempt, digest id, number of records, and
--          a page of these

local PAGE_BYTES = 262144
local letter, remains = tag .. 'letter:' .. ARGV[3], tag .. 'remains:' .. ARGV[3]
local start = tonumber(ARGV[4])
local facts = call('HMGET', letter, 'key', 'reason', 'buried', 'attempt', 'digest')
if not facts[1] or (tonumber(facts[3]) or now) <= now - LETTER_TTL then
  return false
end
local entries, bytes = {}, 0
while #entries < SLICE and bytes < PAGE_BYTES do
  local page = call('LRANGE', remains, start + #entries, start + #entries + 31)
  if #page == 0 then
    break
  end
  for _, entry in ipairs(page) do
    entries[#entries + 1] = entry
    bytes = bytes + #entry
  end
end
return {
  facts[1], facts[2] or '', tonumber(facts[3]) or now, tonumber(facts[4]) or 0, facts[5] or '', call('LLEN', remains), entries,
}
