-- forget: drop identities of delivered records that another shard has taken over, and tell the next.
--
-- Flags     repeatable
-- Commands  HGET HMGET HSET TIME UNLINK ZRANGE ZREM
-- Reply     nil | [text, [text...]]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text): of the timeline whose records these are; '' at first
-- then      the identities that were taken over
-- Returns   a timeline, identities of its records, and until when they count (ms): identity, time, ...; nothing if there
--           are none
--
-- Needs     guard clock tick seen

local key = ARGV[3]
if #ARGV > 3 then
  call('ZREM', seens .. key, unpack(ARGV, 4))
end
for _ = 1, SLICE do
  local next_key = try('ZRANGE', deduped, 0, 0)
  if next_key.err then -- another program has written there
    call('UNLINK', deduped)
  end
  if not next_key[1] then
    return false
  end
  local found = try('ZRANGE', seens .. next_key[1], 0, SLICE - 1, 'WITHSCORES')
  if found[1] then
    for index = 2, #found, 2 do
      found[index] = string.format('%.0f', found[index] - shift)
    end
    return {next_key[1], found}
  end
  call('ZREM', deduped, next_key[1])
end
return {key, {}}
