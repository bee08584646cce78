-- The commands that a claim of small digests runs while more are ready, and nothing around them: what is read is not
-- looked at, and nothing that a timeline keeps is worked out. tests/test_bare_scripts.py holds them to the engine's own.
--
-- KEYS, ARGV  those of claim.lua, of which it reads the slots, the lease and the nonce
-- Returns     what claim.lua returns

local call, layout = redis.call, KEYS[1]
local tag = string.sub(layout, 1, -7)
call('HGET', tag .. 'nothing', 'version')
call('HMGET', layout, 'version', 'shift', 'clock', 'mutes', 'limits')
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
call('PERSIST', layout)
call('XREVRANGE', tag .. 'wake', '+', '-', 'COUNT', 1)
call('HMGET', layout, 'seen', 'hold', 'past')
call('HSET', layout, 'seen', now, 'hold', 0, 'lease', ARGV[4], 'past', 0, 'limits', ARGV[5])
call('ZCARD', tag .. 'postponed')
call('ZRANGEBYSCORE', tag .. 'waiting', '-inf', now, 'WITHSCORES', 'LIMIT', 0, 200)
call('ZRANGEBYSCORE', tag .. 'leased', '-inf', now, 'WITHSCORES', 'LIMIT', 0, 1)
local leases, found = {}, call('ZRANGE', tag .. 'ready', 0, ARGV[3] - 1, 'WITHSCORES')
for index = 1, #found, 2 do
  local key, token = found[index], ARGV[6] .. '-' .. (#leases + 1)
  local log, open, meta = tag .. 'log:' .. key, tag .. 'open:' .. key, tag .. 'meta:' .. key
  call('HMGET', meta, 'end', 'last', 'iteration', 'cool', 'done')
  call('HLEN', meta)
  call('LLEN', open)
  local size = call('LLEN', log)
  call('RENAME', log, open)
  call('ZREM', tag .. 'ready', key)
  call('ZADD', tag .. 'leased', now + ARGV[4], key)
  call('HSET', meta, 'id', token, 'token', token)
  leases[#leases + 1] = {
    key, token, token, 1, 1, 0, found[index + 1], size, 0, 0, '', 0, ARGV[8], '', 0, call('LRANGE', open, 0, size - 1)
  }
end
call('ZRANGEBYSCORE', tag .. 'leased', '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
call('ZCARD', tag .. 'ready')
return {now, 0, '0-0', leases, {}, {}, 0, {}, 0, 0}
