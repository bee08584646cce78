-- maintenance: recover leases that ended by a deadline, a slice at the most, unless recovery is on hold.
--
-- Flags     repeatable
-- Commands  HGET HMGET HSET TIME XADD ZADD ZCARD ZRANGE ZRANGEBYSCORE ZREMRANGEBYRANK
-- Reply     [text...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   deadline (int or '', ms): '' for now
-- Returns   key, lease's end (ms), ... of what was recovered
--
-- Needs     guard clock gap advance

local deadline = tonumber(ARGV[3]) or now
local lease = tonumber(call('HGET', layout, 'lease')) or 0 -- another program may have written "nan"
if lease > 0 and lease < 1e15 then
  local recoverable, hold = watch_gap(lease)
  deadline = now < hold and math.min(deadline, recoverable) or deadline
end
return promote_and_wake(leased, deadline)
