-- letters: list a page of the ids of dead letters, the oldest first, but for those that reached their 30 days.
--
-- Flags     repeatable
-- Parts     look
-- Commands  HGET HMGET TIME ZCOUNT ZRANGE
-- Reply     [[text...], list]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   size (int): how many at the most
-- ARGV[4]   score (text): after which to begin, '' for the first page
-- ARGV[5]   id (text): after which to begin
-- ARGV[6]   last (text): highest score to list, '' in the first page
-- Returns   ids, and the last three arguments for the next page: none, if this is the last one
--
-- Needs     guard clock listing

local size, score, id, last = tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local first = now - DEAD_LETTER_TTL_MS + 1
if score == '' or tonumber(score) < first then -- also of a later page, which may be asked for long after the one before
  score, id = string.format('%.0f', first), ''
end
local members, rest = page(tag .. 'dead', size, score, id, last)
local ids = {}
for index = 1, #members, 2 do
  ids[#ids + 1] = members[index]
end
return {ids, rest}
