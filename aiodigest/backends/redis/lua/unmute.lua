-- unmute: let a timeline be delivered again that was muted.
--
-- Flags     repeatable, replicated
-- Parts     move by hand
-- Commands  HDEL HGET HGETALL HLEN HMGET HSET LLEN LRANGE PEXPIRE TIME XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     text | number
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- ARGV[4]   limits (limits): of the engine
-- ARGV[5]   said (text): "until drop", ms by the server's clock: unmute only if the mute is this one; '' for any
-- ARGV[6]   only_idle (flag): and only if it holds no records
-- Returns   1 if it was muted, 0 if not, -1 if it stays so; the text of an error if the timeline is broken
--
-- Needs     guard clock tick state unmuting

local key, limits, said, only_idle = ARGV[3], parse_limits(ARGV[4]), ARGV[5], ARGV[6] == '1'
local ends, drops = mute_of(key)
if not ends then
  return 0
end
local held, problem = load_all(key)
if not held then
  return problem
end
local state = state_of(key)
local is = string.format('%.0f %d', ends < NEVER_MS and ends - shift or 0, drops and 1 or 0)
if said ~= '' and said ~= is or only_idle and state then
  return -1
end
unmute(held, now, state == 'muted', limits.max_size, limits.ttl)
wake()
return 1
