-- maintenance: make ready what has a lease that ended by a deadline, a slice at the most, unless recovery is on hold.
--
-- Flags     repeatable
-- Commands  HGET HMGET HSET TIME XADD ZADD ZCARD ZMSCORE ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYRANK
-- Reply     [text...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   deadline (int or '', ms): '' for now
-- Returns   key, lease's end (ms), ... of what is ready now
--
-- Needs     guard clock tick gap advance

local deadline = tonumber(ARGV[3])
local ended, lease = deadline and deadline + shift or now, read_time(call('HGET', layout, 'lease'))
if lease > 0 then
  local recoverable, hold = watch_gap(lease)
  ended = now < hold and math.min(ended, recoverable) or ended
end
return promote_and_wake(leased, ended)
