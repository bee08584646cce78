-- listing: pages of a sorted set.
--
-- A page begins after the member with which the one before ended, even if that is gone by now, and not at a rank:
-- whatever leaves the set meanwhile would move those behind it to a page that was read already. The listing ends with
-- what was last when it began, so that it does end where members are placed ever later.

-- Return whether a name comes after another in a sorted set, which compares bytes; Lua compares as the locale does.
local function comes_after(one, other)
  for index = 1, math.min(#one, #other) do
    local left, right = string.byte(one, index), string.byte(other, index)
    if left ~= right then
      return left > right
    end
  end
  return #one > #other
end

-- Return how many members of a set come before those after `score` and `member`.
local function rank_after(set, score, member)
  local low, high = call('ZCOUNT', set, '-inf', '(' .. score), call('ZCOUNT', set, '-inf', score)
  while low < high do -- of those with this score
    local middle = math.floor((low + high) / 2)
    if comes_after(call('ZRANGE', set, middle, middle)[1], member) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Return up to `size` members with their scores, and the arguments of the next page, empty if this is the last one.
--
-- score, member  where the page before has ended
-- last           the highest score to list; '' in the first page: that of the last member
local function page(set, size, score, member, last)
  if last == '' then
    last = call('ZRANGE', set, -1, -1, 'WITHSCORES')[2] or '0'
  end
  local start, all = rank_after(set, score, member), call('ZCOUNT', set, '-inf', last)
  local stop = math.min(start + size, all)
  if stop <= start then
    return {}, {}
  end
  local found = call('ZRANGE', set, start, stop - 1, 'WITHSCORES')
  return found, stop < all and {found[#found], found[#found - 1], last} or {}
end
