-- unmuting: end a mute, and schedule what waited under it.
--
-- Needs    schedule entries timelines mutes

-- `waits` if it holds records and is in no set. It is due when it would have been, but not before the mute has ended, or
-- at once if it holds `max_size` records, or as many bytes as a digest may; limits that the timeline has stored come
-- first, and some callers know none.
local function unmute(held, ends, waits, max_size, ttl)
  local key, due = held.key, math.max(held.due, math.min(ends, now))
  before = before or head()
  call('HDEL', silences, key)
  call('ZREM', mutes, key)
  if call('ZCARD', mutes) == 0 then
    call('HDEL', layout, 'mutes')
  end
  need_mutes(held, false)
  held.due = 0
  if waits then
    if held.own then
      local limits = parse_limits(held.own)
      max_size, ttl = limits.max_size, limits.ttl
    end
    local may_be_full = due > now and max_size > 0 and not held.id and held.logged >= max_size
    if may_be_full and #collect({}, {}, logs .. key, held.logged) >= max_size then
      due = now
    end
    if not held.id and held.max_bytes > 0 and held.bytes >= held.max_bytes then
      due = math.min(due, now)
    end
    if ttl then
      touch(held, math.max(due - now, 0) + ttl) -- it must still be there when its time comes
    end
    place(key, due)
  end
  save(held, FIELDS)
end
