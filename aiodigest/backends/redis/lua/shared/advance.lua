-- advance: make timelines ready, and wake the sleeping workers.
--
-- Needs    clock promotion schedule

-- Make ready what is in `from` with a score up to `deadline`, a slice at the most; return keys and the server's times.
local function promote_and_wake(from, deadline)
  before = head()
  local moved = promote(from, deadline)
  if #moved > 0 then
    earliest = -1
  end
  wake()
  for index = 2, #moved, 2 do
    moved[index] = string.format('%.0f', moved[index] - shift)
  end
  return moved
end
