-- gap: hold recovery back after a time in which no worker could renew its leases.

-- Note the time of a claim or a renewal, by a worker that was first answered at `since` (nil: it is new). After a gap of
-- more than half a lease, whose holders could not renew, nothing is recovered for one more lease. Return until when.
-- Workers that run for a moment now and then would hold it back for ever: once it was for a new one, the next new one
-- recovers at once, unless one was heard of meanwhile that was there before, or stayed for a lease.
local function watch_gap(lease, since)
  local marks = call('HMGET', layout, 'seen', 'hold', 'newcomer')
  local seen, hold, newcomer = tonumber(marks[1]) or 0, tonumber(marks[2]) or 0, marks[3] == '1'
  if seen > 0 and math.abs(now - seen) > math.floor(lease / 2) and hold <= now and (since or not newcomer) then
    hold, newcomer = now + lease, not since
  end
  hold = hold == hold and math.min(hold, now + lease) or now + lease -- another program may have written "nan"
  newcomer = newcomer and not (since and since < math.max(hold, now) - lease)
  call('HSET', layout, 'seen', now, 'hold', hold, 'lease', lease, 'newcomer', newcomer and 1 or 0)
  return hold
end
