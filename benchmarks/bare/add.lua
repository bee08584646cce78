-- The commands that an add runs, and nothing around them: nothing is checked, and no command depends on what another
-- answers, but for the time to which a push moves a timeline. tests/test_bare_scripts.py holds them to the engine's own.
--
-- KEYS[1]  layout of the shard, "{tag}:layout"
-- ARGV[1]  'ready' or 'waiting': where the timelines are
-- then     for each add: key; entry

local call, layout = redis.call, KEYS[1]
local tag = string.sub(layout, 1, -7)
local ready, waiting, metas, logs = tag .. 'ready', tag .. 'waiting', tag .. 'meta:', tag .. 'log:'
local waits = ARGV[1] == 'waiting'
call('HGET', tag .. 'nothing', 'version')
call('HMGET', layout, 'version', 'shift', 'clock', 'mutes', 'limits')
call('TIME')
for index = 2, #ARGV, 2 do
  local key = ARGV[index]
  call('ZSCORE', ready, key)
  if waits then
    local due = call('ZSCORE', waiting, key)
    call('HMGET', metas .. key, 'end', 'own', 'id', 'last', 'cool', 'counted', 'needs')
    call('RPUSH', logs .. key, ARGV[index + 1])
    if index == 2 then -- the first push looks what is due first, so that the last can tell whether to wake anybody
      call('ZCARD', ready)
      call('ZRANGE', waiting, 0, 0, 'WITHSCORES')
    end
    call('ZADD', waiting, due + 1, key)
  else
    call('HMGET', metas .. key, 'end', 'own')
    call('RPUSH', logs .. key, ARGV[index + 1])
  end
end
