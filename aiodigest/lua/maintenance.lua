-- maintenance: recover leases that ended by a deadline, a slice at the most, unless recovery is on hold.
--
-- ARGV[3]  deadline, ms, or '' for now
-- Returns  key, lease's end (ms), ... of what was recovered

if now < (tonumber(call('HGET', layout, 'hold')) or 0) then
  return {}
end
watch_head()
local recovered = promote(leased, tonumber(ARGV[3]) or now)
finish()
return recovered
