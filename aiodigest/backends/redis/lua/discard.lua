-- discard: drop a dead letter.
--
-- ARGV[3]  id
-- Returns  1 if there was one, else 0

local id = ARGV[3]
local existed = call('EXISTS', tag .. 'letter:' .. id)
call('UNLINK', tag .. 'letter:' .. id, tag .. 'remains:' .. id)
call('ZREM', tag .. 'dead', id)
return existed
