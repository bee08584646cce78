-- dead: what the dead letters of a shard take, and the end of one.

-- a sorted set: the letters by when they became some; a hash: the bytes of each, under '' those of all, and under 'most'
-- what all may take by the word of whose close it was
local dead, sizes = tag .. 'dead', tag .. 'sizes'

-- Note that a letter takes so many bytes more. Where another program has written, it is not counted.
local function weigh(id, bytes)
  try('HINCRBY', sizes, id, bytes)
  try('HINCRBY', sizes, '', bytes)
  try('PEXPIRE', sizes, DEAD_LETTER_TTL_MS)
end

-- Return how many bytes all take.
local function weight()
  local total = try('HGET', sizes, '')
  return type(total) == 'string' and #total < 16 and tonumber(total) or 0
end

local function drop_letter(id)
  local bytes = try('HGET', sizes, id)
  if type(bytes) == 'string' then
    try('HDEL', sizes, id)
    try('HINCRBY', sizes, '', -(tonumber(bytes) or 0))
  end
  call('UNLINK', tag .. 'letter:' .. id, tag .. 'remains:' .. id)
  call('ZREM', dead, id)
  if call('ZCARD', dead) == 0 then
    call('UNLINK', sizes) -- what an earlier version has dropped is still counted there
  end
end

-- Let letters go whose time is over, `most` of them at the most; return how many.
local function drop_old(most)
  local old = try('ZRANGEBYSCORE', dead, '-inf', now - DEAD_LETTER_TTL_MS, 'LIMIT', 0, most)
  for _, id in ipairs(old) do -- none where another program has written
    drop_letter(id)
  end
  return #old
end
