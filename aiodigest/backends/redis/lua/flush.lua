-- flush: make a timeline ready now, or after the delivery under way.
--
-- Flags     repeatable
-- Parts     move by hand
-- Commands  HGET HMGET HSET TIME XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     number
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- Returns   1 if it holds records, else 0
--
-- Needs     guard clock tick flushing

local key = ARGV[3]
local state = flush(key)
wake()
return state and 1 or 0
