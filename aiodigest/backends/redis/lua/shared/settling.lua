-- settling: end a delivery, and schedule what came since.
--
-- Needs    budget timelines schedule hours

local function end_delivery(held)
  held.id, held.token, held.attempts, held.lost, held.open_dropped, held.part = nil
  held.cut, held.bound, held.frozen, held.parted, held.since, held.error, held.pass = nil
  call('UNLINK', opens .. held.key)
end

-- Schedule what came since a digest that is gone; limits that the timeline has stored come first.
local function settle(held, max_size, ttl, hours)
  local flush = held.flush
  leave(held.key)
  held.flush, held.pass = nil, flush and held.logged > 0 and '1' or nil
  if held.logged == 0 then
    go_idle(held)
    return
  end
  if held.own then
    local limits = parse_limits(held.own)
    max_size, ttl = limits.max_size, limits.ttl
  end
  local due = flush and now or math.max(held.cool, held.next > 0 and held.next or now)
  if due > now and max_size > 0 and held.logged >= max_size then
    -- Needs    entries
    due = #collect({}, {}, logs .. held.key, held.logged) >= max_size and now or due
  end
  if held.max_bytes > 0 and held.bytes >= held.max_bytes then
    due = math.min(due, now)
  end
  due = flush and due or within(hours, held.key, due)
  held.next = 0
  touch(held, ttl + ((hours or held.needs) and math.max(due - now, 0) or 0)) -- it must still be there when its time comes
  place(held.key, due)
end
