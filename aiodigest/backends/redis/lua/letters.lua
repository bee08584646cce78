-- letters: a page of the ids of dead letters, the oldest first, but for those that reached their 30 days.
--
-- ARGV[3]  how many at the most
-- ARGV[4]  score after which to begin, '' for the first page
-- ARGV[5]  id after which to begin
-- ARGV[6]  highest score to list, '' in the first page
-- Returns  ids, and the last three arguments for the next page: none, if this is the last one

local score, member, first = ARGV[4], ARGV[5], now - LETTER_TTL + 1
if score == '' or tonumber(score) < first then -- also of a later page, which may be asked for long after the one before
  score, member = whole(first), ''
end
local members, rest = page(tag .. 'dead', tonumber(ARGV[3]), score, member, ARGV[6])
local ids = {}
for index = 1, #members, 2 do
  ids[#ids + 1] = members[index]
end
return {ids, rest}
