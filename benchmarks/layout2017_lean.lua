-- The same layout in as few steps as it can be written: no argument is read by name, no key is made twice. What an add
-- still spends here are the commands that this layout asks for.

local command, prefix, ttl, now, timeline = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local ready, waiting = prefix .. ':ready', prefix .. ':waiting'
local key = prefix .. ':t:' .. timeline

if command == 'CLOSE' then
  redis.call('SETEX', key .. ':last', ttl, now)
  redis.call('ZREM', ready, timeline)
  redis.call('ZADD', waiting, now + ARGV[6], timeline)
  return 1
end

local record, value, timestamp, increment, maximum = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
redis.call('SETEX', key .. ':r:' .. record, ttl, value)
redis.call('ZADD', key, timestamp, record)
redis.call('EXPIRE', key, ttl)
local is_ready = 0
if not redis.call('ZSCORE', ready, timeline) then
  local due = redis.call('ZSCORE', waiting, timeline)
  if not due then
    redis.call('ZADD', ready, timestamp, timeline)
    is_ready = 1
  else
    local later = math.min(due + increment, (redis.call('GET', key .. ':last') or timestamp) + maximum)
    if later ~= tonumber(due) then
      redis.call('ZADD', waiting, later, timeline)
    end
  end
end
local capacity = tonumber(ARGV[11])
math.randomseed(now * 1000000)
if capacity > 0 and math.random() < tonumber(ARGV[12]) and redis.call('ZCARD', key) > capacity then
  for _, id in ipairs(redis.call('ZREVRANGE', key, capacity, -1)) do
    redis.call('ZREM', key, id)
    redis.call('DEL', key .. ':r:' .. id)
  end
end
return is_ready
