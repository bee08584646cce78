-- seen: the records of timelines that were delivered, and are not to be delivered again for a time.
--
-- Needs    keys entries

-- of each timeline a sorted set: the identities of such records by when that time ends; and one of these timelines
local seens, deduped = tag .. 'seen:', tag .. 'seens'

-- Return which of list[first] to list[last], which are entries, are of records that were delivered.
local function which_seen(key, list, first, last)
  local found, known = {}, try('ZCARD', seens .. key)
  if type(known) == 'table' or known == 0 then -- or another program has written there
    return found
  end
  for start = first, last, SLICE do
    local names, stop = {}, math.min(last, start + SLICE - 1)
    for index = start, stop do
      names[#names + 1] = identity(list[index])
    end
    local ends = call('ZMSCORE', seens .. key, unpack(names))
    for index = start, stop do
      found[index] = tonumber(ends[index - start + 1] or 0) > now
    end
  end
  return found
end

-- Keep what is known of a timeline until it ends, the latest MOST_SEEN of it.
local function keep_until(key, ends)
  local names = seens .. key
  local over = call('ZCARD', names) - MOST_SEEN
  if over > 0 then
    call('ZREMRANGEBYRANK', names, 0, over - 1)
  end
  call('PEXPIRE', names, ends - now)
  call('ZADD', deduped, ends, key)
  call('PEXPIRE', deduped, call('ZRANGE', deduped, -1, -1, 'WITHSCORES')[2] - now)
end

-- Remember for `window` milliseconds what was delivered of the first `taken` entries of a digest: the records `wanted`, or
-- (nil) all but those that are `lost`, or too old.
local function remember(held, taken, window, wanted, lost)
  -- Needs    aging
  local scored = {}
  for _, entry in ipairs(collect({}, {}, opens .. held.key, math.min(taken, held.opened))) do
    local id = identity(entry)
    local is_delivered = wanted and wanted[id]
    if not wanted then
      is_delivered = not lost[id] and not is_aged(held, entry, id)
    end
    if is_delivered then
      scored[#scored + 1] = now + window
      scored[#scored + 1] = id
    end
  end
  local names = seens .. held.key
  local gone = try('ZRANGEBYSCORE', deduped, '-inf', now, 'LIMIT', 0, 10)
  local ended = try('ZCOUNT', names, '-inf', now)
  if #scored == 0 or gone.err or type(ended) == 'table' then
    return -- or another program has written there: then it may come again
  end
  for _, key in ipairs(gone) do
    call('UNLINK', seens .. key)
    call('ZREM', deduped, key)
  end
  if ended > 0 then
    call('ZREMRANGEBYRANK', names, 0, ended - 1)
  end
  for start = 1, #scored, 2 * SLICE do
    call('ZADD', names, unpack(scored, start, math.min(#scored, start + 2 * SLICE - 1)))
  end
  keep_until(held.key, math.max(now + window, tonumber(call('ZMSCORE', deduped, held.key)[1] or 0)))
end

-- Let some records be delivered again.
local function unsee(key, entries)
  for start = 1, #entries, SLICE do
    local names = {}
    for index = start, math.min(#entries, start + SLICE - 1) do
      names[#names + 1] = identity(entries[index])
    end
    try('ZREM', seens .. key, unpack(names))
  end
end
