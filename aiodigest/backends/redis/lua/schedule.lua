-- schedule: make ready what is due by a deadline, a slice at the most.
--
-- Flags     repeatable
-- Commands  HGET HMGET HSET TIME XADD ZADD ZCARD ZMSCORE ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYRANK
-- Reply     [text...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   deadline (int or '', ms): '' for now
-- Returns   key, due time (ms), ... of what was promoted
--
-- Needs     guard clock tick advance

local deadline = tonumber(ARGV[3])
return promote_and_wake(waiting, deadline and deadline + shift or now)
