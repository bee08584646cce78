-- remember: take over identities of records that another shard has delivered; doing so again is harmless.
--
-- Flags     begins-namespace, repeatable, replicated
-- Commands  HGET HMGET HSET PEXPIRE TIME ZADD ZCARD ZRANGE ZREMRANGEBYRANK ZSCORE
-- Reply     int
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text): of their timeline
-- then      identity, until when it counts (ms), ...
-- Returns   1
--
-- Needs     guard clock tick seen

local key = ARGV[3]
local latest_end, known = 0, try('ZCARD', seens .. key)
for index = 4, type(known) == 'table' and 0 or #ARGV, 2 do -- none, where another program has written
  local ends = ARGV[index + 1] + shift
  if ends > now and (tonumber(call('ZSCORE', seens .. key, ARGV[index])) or 0) < ends then
    call('ZADD', seens .. key, ends, ARGV[index])
    latest_end = math.max(latest_end, ends)
  end
end
if latest_end > 0 then
  keep_until(key, math.max(latest_end, tonumber(call('ZSCORE', deduped, key) or 0)))
end
return 1
