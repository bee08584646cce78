-- gap: hold recovery back after a time in which no worker could renew its leases.
--
-- Needs    clock

-- Note the time of a claim or a renewal, and return until which end leases may be recovered now, and when the others may
-- be. After a gap of more than half a lease, whose holders could not renew, those wait for one more lease: the hold.
-- Leases that ended before the end of the hold before it have had that time already: else nothing would be recovered
-- where workers run for a moment now and then, and each begins with a gap. A claim notes its limits, too, for those who add.
local function watch_gap(lease, limits)
  local marks = call('HMGET', layout, 'seen', 'hold', 'past')
  local seen, hold, past = read_time(marks[1]), read_time(marks[2]), read_time(marks[3])
  if seen > 0 and now - seen > math.floor(lease / 2) and hold <= now then
    hold, past = now + lease, hold
  end
  hold, past = math.min(hold, now + lease), math.min(past, now) -- another program may have written later ones
  if limits then
    call('HSET', layout, 'seen', now, 'hold', hold, 'lease', lease, 'past', past, 'limits', limits)
  else
    call('HSET', layout, 'seen', now, 'hold', hold, 'lease', lease, 'past', past)
  end
  return now >= hold and now or past - 1, hold
end
