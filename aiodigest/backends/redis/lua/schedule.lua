-- schedule: make ready what is due by a deadline, a slice at the most.
--
-- ARGV[3]  deadline, ms, or '' for now
-- Returns  key, due time (ms), ... of what was promoted

watch_head()
local promoted = promote(waiting, tonumber(ARGV[3]) or now)
finish()
return promoted
