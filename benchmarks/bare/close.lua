-- The commands that a close of digests runs that were delivered as a whole while nothing came to their timelines, and
-- nothing around them: nothing is checked. tests/test_bare_scripts.py holds them to the engine's own.
--
-- KEYS, ARGV  those of close.lua; each item is of 13 arguments, as it has no dead letters
-- Returns     what close.lua returns

local call, layout, answers, delivered = redis.call, KEYS[1], {}, 0
local tag = string.sub(layout, 1, -7)
call('HGET', tag .. 'nothing', 'version')
call('HMGET', layout, 'version', 'shift', 'clock', 'mutes', 'limits')
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
call('PERSIST', layout)
for index = 5, #ARGV, 13 do
  local key, cool = ARGV[index], ARGV[index + 7]
  local meta, open = tag .. 'meta:' .. key, tag .. 'open:' .. key
  call('HMGET', meta, 'id', 'token', 'end', 'iteration', 'last', 'cool', 'done')
  call('HLEN', meta)
  call('LLEN', tag .. 'log:' .. key)
  call('LLEN', open)
  if index == 5 and call('ZCARD', tag .. 'ready') == 0 then -- when what is next is due, for the doorbell
    call('ZRANGE', tag .. 'waiting', 0, 0, 'WITHSCORES')
  end
  call('ZREM', tag .. 'leased', key)
  call('UNLINK', open, meta)
  call('HSET', meta, 'done', ARGV[index + 1] .. ' ' .. ARGV[index + 2] .. ' closed  0', 'iteration', 1, 'last', now,
    'cool', now + cool)
  call('PEXPIRE', meta, cool + 300000)
  answers[#answers + 1], delivered = {'closed', '', 0, 0}, delivered + ARGV[index + 4]
end
call('HINCRBY', layout, 'digests', #answers)
call('HINCRBY', layout, 'delivered', delivered)
return answers
