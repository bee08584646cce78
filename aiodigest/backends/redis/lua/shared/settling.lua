-- settling: end a delivery, and schedule what came since.
--
-- Needs    budget timelines schedule

local function end_delivery(held)
  held.id, held.token, held.attempts, held.lost, held.open_dropped, held.part = nil
  held.cut, held.bound, held.frozen, held.parted, held.since, held.error = nil
  call('UNLINK', opens .. held.key)
end

-- Schedule what came since a digest that is gone; limits that the timeline has stored come first.
local function settle(held, max_size, ttl)
  local due = held.flush and now or math.max(held.cool, now)
  leave(held.key)
  held.flush = nil
  if held.logged == 0 then
    held['end'], held.dropped, held.own, held.idle = 0, 0, nil, true
    return
  end
  if held.own then
    local limits = parse_limits(held.own)
    max_size, ttl = limits.max_size, limits.ttl
  end
  touch(held, ttl)
  if due > now and max_size > 0 and held.logged >= max_size then
    -- Needs    entries
    due = #collect({}, {}, logs .. held.key, held.logged) >= max_size and now or due
  end
  place(held.key, due)
end
