-- close: end deliveries that are known to have ended for good, bury what failed, schedule what came since.
--
-- ARGV[3]  nonce for the names of the next digest and of dead letters
-- ARGV[4]  number of the first close in the caller's request, from 1
-- then     for each: key, token, digest id, entries taken, records delivered, records aged, 1 if it counts as a
--          digest, cool-down (ms), lease (ms), max_size, ttl (ms), number of letters; for each letter: reason, number of ids
--          (-1: all records of the part), ids
-- Returns  for each: {status, digest id, entries left}, or the text of an error; fewer than asked for if much had to
--          be read, the rest was not looked at

call('PERSIST', layout)

local LETTER_LIMIT = 10000
local dead = tag .. 'dead'

-- Letters over the limit or out of their time make room, a few at each burial.
local function prune()
  local excess = call('ZCARD', dead) - LETTER_LIMIT
  local oldest = call('ZRANGE', dead, 0, 9, 'WITHSCORES')
  for index = 1, #oldest, 2 do
    if (index - 1) / 2 < excess or tonumber(oldest[index + 1]) <= now - LETTER_TTL then
      call('ZREM', dead, oldest[index])
      call('UNLINK', tag .. 'letter:' .. oldest[index], tag .. 'remains:' .. oldest[index])
      count('letters_dropped', 1)
    end
  end
end

local function is_aged(entry, cut)
  return cut > 0 and identity(entry) ~= entry and struct.unpack('>i8', entry, 2) < cut * 1000
end

-- Set aside the records of a part (newest first, with the place of each id) that are `wanted` (nil: all).
local function bury(id, reason, wanted, held, part, places)
  local chosen, records = {}, {}
  if wanted then
    for record_id in pairs(wanted) do
      chosen[#chosen + 1] = places[record_id]
    end
    table.sort(chosen)
  end
  for index = 1, wanted and #chosen or #part do
    local entry = part[wanted and chosen[index] or index]
    if not is_aged(entry, held.cut) then
      records[#records + 1] = entry
    end
  end
  if #records == 0 then
    return
  end
  rewrite(tag .. 'remains:' .. id, records, #records, LETTER_TTL)
  call('HSET', tag .. 'letter:' .. id, 'key', held.key, 'reason', reason, 'buried', now,
    'attempt', held.attempts, 'digest', held.id)
  call('PEXPIRE', tag .. 'letter:' .. id, LETTER_TTL)
  call('ZADD', dead, now, id)
  count('buried', #records)
  prune()
end

local function close(item, nonce)
  local held, problem = load_all(item.key)
  if not held then
    return problem
  end
  local status, next_id, left = fenced(held, item.token, item.digest_id)
  if status ~= 'held' then
    return {status, next_id, left}
  end
  if #item.letters > 0 then
    local part = collect({}, {}, open_of(held.key), math.min(item.taken, held.opened))
    local places = {} -- looked up, not searched: there may be a letter for every record
    for index, entry in ipairs(part) do
      places[identity(entry)] = index
    end
    for index, letter in ipairs(item.letters) do
      bury(nonce .. '-' .. index, letter.reason, letter.wanted, held, part, places)
    end
  end
  count('digests', item.delivered > 0 and 1 or 0)
  count('delivered', item.delivered)
  count('aged', item.aged)
  if held.opened > item.taken then
    status, next_id, left = 'part', nonce, held.opened - item.taken
    call('LTRIM', open_of(held.key), item.taken, -1)
    held.id, held.attempts, held.open_dropped, held.since = nonce, 1, 0, 0
    held.frozen, held.error = nil, nil
    held.parted = (held.parted or item.counts) and '1' or nil
    touch(held, item.ttl) -- or the rest might end before its turn
    leave(held.key)
    call('ZADD', leased, now + item.lease, held.key)
  else
    status, next_id, left = 'closed', '', 0
    if item.counts or held.parted then
      held.iteration = held.iteration + 1
      held.last, held.cool = now, now + item.cool
    end
    end_delivery(held)
    settle(held, item.max_size, item.ttl)
  end
  answer(held, item.token, item.digest_id, status, next_id, left)
  save(held)
  return {status, next_id, left}
end

local function next_item()
  local item = {
    key = next_argument(), token = next_argument(), digest_id = next_argument(), taken = next_number(),
    delivered = next_number(), aged = next_number(), counts = next_flag(), cool = next_number(), lease = next_number(),
    max_size = next_number(), ttl = next_number(), letters = {},
  }
  for index = 1, next_number() do
    item.letters[index] = {reason = next_argument(), wanted = next_ids()}
  end
  return item
end

return answer_each(next_item, close)
