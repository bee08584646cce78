-- gap: hold recovery back after a time in which no worker could renew its leases.

-- Note the time of a claim or a renewal. After a gap of more than half a lease, whose holders could not renew, nothing is
-- recovered for one more lease. Return until when.
local function watch_gap(lease)
  local marks = call('HMGET', layout, 'seen', 'hold')
  local seen, hold = tonumber(marks[1]) or 0, tonumber(marks[2]) or 0
  if seen > 0 and math.abs(now - seen) > math.floor(lease / 2) and hold <= now then
    hold = now + lease
  end
  hold = hold == hold and math.min(hold, now + lease) or now + lease -- another program may have written "nan"
  call('HSET', layout, 'seen', now, 'hold', hold, 'lease', lease)
  return hold
end
