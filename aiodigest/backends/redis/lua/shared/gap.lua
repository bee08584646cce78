-- gap: hold recovery back after a time in which no worker could renew its leases.

-- Note the time of a claim or a renewal, and return until which end leases may be recovered now, and when the others may
-- be. After a gap of more than half a lease, whose holders could not renew, those wait for one more lease: the hold.
-- Leases that ended before the end of the hold before it have had that time already: else nothing would be recovered
-- where workers run for a moment now and then, and each begins with a gap.
local function watch_gap(lease)
  local marks = call('HMGET', layout, 'seen', 'hold', 'past')
  local seen, hold, past = tonumber(marks[1]) or 0, tonumber(marks[2]) or 0, tonumber(marks[3]) or 0
  if seen > 0 and math.abs(now - seen) > math.floor(lease / 2) and hold <= now then
    hold, past = now + lease, hold
  end
  hold = hold == hold and math.min(hold, now + lease) or now + lease -- another program may have written "nan"
  past = past <= now and past or 0 -- else the clock has gone back
  call('HSET', layout, 'seen', now, 'hold', hold, 'lease', lease, 'past', past)
  return now >= hold and now or past - 1, hold
end
