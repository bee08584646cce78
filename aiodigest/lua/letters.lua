-- letters: a page of the ids of dead letters, the oldest first, but for those that reached their 30 days.
--
-- ARGV[3]  how many at the most
-- ARGV[4]  score after which to begin, '' for the first page
-- ARGV[5]  id after which to begin
-- ARGV[6]  highest score to list, '' in the first page
-- Returns  ids, and the last three arguments for the next page: none, if this is the last one

local score = ARGV[4] == '' and whole(now - LETTER_TTL + 1) or ARGV[4]
local members, rest = page(tag .. 'dead', tonumber(ARGV[3]), score, ARGV[5], ARGV[6])
local ids = {}
for index = 1, #members, 2 do
  ids[#ids + 1] = members[index]
end
return {ids, rest}
