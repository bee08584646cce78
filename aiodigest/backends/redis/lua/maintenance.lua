-- maintenance: recover leases that ended by a deadline, a slice at the most, unless recovery is on hold.
--
-- ARGV[3]  deadline, ms, or '' for now
-- Returns  key, lease's end (ms), ... of what was recovered

local lease = tonumber(call('HGET', layout, 'lease'))
if lease and now < watch_gap(lease) then
  return {}
end
watch_head()
local recovered = promote(leased, tonumber(ARGV[3]) or now)
finish()
return recovered
