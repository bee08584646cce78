-- The commands that an add runs, and nothing around them: nothing is checked, and nothing depends on what they answer.
--
-- KEYS[1]  layout of the shard, "{tag}:layout"
-- ARGV[1]  'ready' or 'waiting': where the timelines are
-- then     for each add: key; entry

local tag = string.sub(KEYS[1], 1, -7)
local ready, waiting, metas, logs = tag .. 'ready', tag .. 'waiting', tag .. 'meta:', tag .. 'log:'
local waits = ARGV[1] == 'waiting'
for index = 2, #ARGV, 2 do
  local key = ARGV[index]
  redis.call('ZSCORE', ready, key)
  if waits then
    local due = redis.call('ZSCORE', waiting, key)
    redis.call('HMGET', metas .. key, 'end', 'own', 'id', 'last', 'cool', 'counted')
    redis.call('RPUSH', logs .. key, ARGV[index + 1])
    redis.call('ZADD', waiting, due + 1, key) -- its push
  else
    redis.call('HMGET', metas .. key, 'end', 'own')
    redis.call('RPUSH', logs .. key, ARGV[index + 1])
  end
end
