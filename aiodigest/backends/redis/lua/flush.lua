-- flush: make a timeline ready now, or after the delivery under way.
--
-- Flags     repeatable
-- Parts     move by hand
-- Commands  EXISTS HGET HMGET HSET TIME XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     number
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- Returns   1 if it holds records, else 0
--
-- Needs     guard clock tick state schedule

local key = ARGV[3]
local state, due = state_of(key)
if state == 'waiting' then
  due = tonumber(call('ZSCORE', postponed, key)) or due
  call('ZREM', postponed, key)
  place(key, math.min(due, now), true)
end
if state and call('EXISTS', metas .. key) == 1 then -- its digest passes hours, or the one after that under delivery
  try('HSET', metas .. key, state == 'leased' and 'flush' or 'pass', '1')
end
wake()
return state and 1 or 0
