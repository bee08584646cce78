-- promotion: make timelines ready whose time has come.
--
-- Needs    keys

-- Make ready what is in `from` with a score up to `latest`, MOVES at most, and keep the scores, or the times when what was
-- postponed was due; return keys and these.
local function promote(from, latest)
  local keys = from == waiting and call('ZCARD', postponed) > 0 and {}
  if keys and not call('ZMSCORE', waiting, call('ZRANGE', postponed, 0, 0)[1])[1] then
    call('ZREMRANGEBYRANK', postponed, 0, 0) -- an earlier version has taken it out of `waiting`
  end
  local moved = call('ZRANGEBYSCORE', from, '-inf', latest, 'WITHSCORES', 'LIMIT', 0, MOVES)
  if #moved > 0 then
    local scored, dues = {}, {}
    if keys then
      for index = 1, #moved, 2 do
        keys[#keys + 1] = moved[index]
      end
      dues = call('ZMSCORE', postponed, unpack(keys))
      call('ZREM', postponed, unpack(keys))
    end
    for index = 1, #moved, 2 do
      moved[index + 1] = dues[(index + 1) / 2] or moved[index + 1]
      scored[index], scored[index + 1] = moved[index + 1], moved[index]
    end
    call('ZREMRANGEBYRANK', from, 0, #moved / 2 - 1)
    call('ZADD', ready, unpack(scored))
  end
  return moved
end
