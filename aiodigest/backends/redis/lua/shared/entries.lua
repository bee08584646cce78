-- entries: the records in lists of entries, of which the last one of each record counts.
--
-- Needs    budget

-- Return the identity of an entry's record; an entry that cannot be read is its own. The format is that of
-- records/entries.py.
local function identity(entry)
  local flags, _, _, _, _, _, _, length = string.byte(entry, 1, 8)
  if flags == VERSION + ARRIVAL and length and length > 0 then -- most are like this, and it takes half the time
    length = length % PACKED
    return #entry < 8 + length and entry or string.sub(entry, 8, 8 + length)
  end
  if flags and flags % ARRIVAL == VERSION and flags < 2 * TRACED then -- no unknown flag
    local start = flags % TRACED >= ARRIVAL and 8 or 10
    local size, high, low = string.byte(entry, start, start + 2)
    if size then
      local stop = size > 0 and start + size % PACKED or start + 2 + (low and high * 256 + low or 0)
      if #entry >= stop + (flags >= TRACED and CONTEXT_SIZE or 0) then
        return string.sub(entry, start, stop)
      end
    end
  end
  return entry
end

-- Append to `kept` the last entry of each record among the first `length` of a list, newest first, unless it is `seen`.
local function collect(kept, seen, list, length)
  local stop, number = length - 1, #kept
  while stop >= 0 do
    local start = math.max(0, stop - SLICE + 1)
    local entries = call('LRANGE', list, start, stop)
    for index = #entries, 1, -1 do
      local id = identity(entries[index])
      if not seen[id] then
        seen[id] = true
        number = number + 1
        kept[number] = entries[index]
      end
    end
    stop = start - 1
  end
  scanned = scanned + length
  return kept
end
