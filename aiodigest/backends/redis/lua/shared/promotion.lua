-- promotion: make timelines ready whose time has come.
--
-- Needs    keys

-- Make ready what is in `from` with a score up to `latest`, MOVES at most, and keep the scores; return keys and scores.
local function promote(from, latest)
  local moved = call('ZRANGEBYSCORE', from, '-inf', latest, 'WITHSCORES', 'LIMIT', 0, MOVES)
  if #moved > 0 then
    local scored = {}
    for index = 1, #moved, 2 do
      scored[index], scored[index + 1] = moved[index + 1], moved[index]
    end
    call('ZREMRANGEBYRANK', from, 0, #moved / 2 - 1)
    call('ZADD', ready, unpack(scored))
  end
  return moved
end
