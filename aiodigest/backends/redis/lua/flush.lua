-- flush: make a timeline ready now, or after the delivery under way.
--
-- Flags     repeatable
-- Parts     move by hand
-- Commands  HDEL HGET HGETALL HLEN HMGET HSET LLEN LRANGE PEXPIRE TIME XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     number
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- Returns   1 if it is due then, 0 if it holds no records or is muted
--
-- Needs     guard clock tick flushing

local key = ARGV[3]
if has_mutes then
  -- Needs    unmuting
  local ends = mute_of(key) or now
  local held = ends <= now and load_all(key)
  if held then
    unmute(held, ends, state_of(key) == 'muted', 0)
  end
end
local state = flush(key)
wake()
return state and 1 or 0
