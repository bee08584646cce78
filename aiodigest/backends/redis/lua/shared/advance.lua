-- advance: make timelines ready, and wake the sleeping workers.
--
-- Needs    promotion schedule

-- Make ready what is in `from` with a score up to `deadline`, a slice at the most; return keys and scores.
local function promote_and_wake(from, deadline)
  before = head()
  local moved = promote(from, deadline)
  if #moved > 0 then
    earliest = -1
  end
  wake()
  return moved
end
