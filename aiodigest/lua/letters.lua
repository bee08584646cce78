-- letters: the ids of dead letters, the oldest first; those that reached their 30 days are skipped and cleared away.
--
-- ARGV[3]  the first, from 0
-- ARGV[4]  how many at the most
-- Returns  ids

local dead = tag .. 'dead'
local start = tonumber(ARGV[3])
local members = call('ZRANGE', dead, start, start + tonumber(ARGV[4]) - 1)
local ids, pruned = {}, 0
for _, id in ipairs(members) do
  if call('EXISTS', tag .. 'letter:' .. id) == 1 then
    ids[#ids + 1] = id
  elseif pruned < 10 then
    pruned = pruned + 1
    call('ZREM', dead, id)
    call('UNLINK', tag .. 'remains:' .. id)
    count('letters_dropped', 1)
  end
end
write_counts()
return ids
