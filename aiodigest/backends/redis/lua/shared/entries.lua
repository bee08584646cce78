-- entries: the records in lists of entries, of which the last one of each id counts.
--
-- Needs    budget

-- Return the id of an entry; one that cannot be read stands for itself. The format is that of records/entries.py.
local function identity(entry)
  local flags, high, low = string.byte(entry), string.byte(entry, 10, 11)
  if low and flags % UNSTAMPED == 1 and flags < 2 * TRACED then -- version 1, and no unknown flag
    local stop = 11 + high * 256 + low
    if #entry >= stop + (flags >= TRACED and CONTEXT_SIZE or 0) then
      return string.sub(entry, 12, stop)
    end
  end
  return entry
end

-- Append to `kept` the last entry of each id among the first `length` of a list, newest first, unless it is `seen`.
local function collect(kept, seen, list, length)
  local stop = length - 1
  while stop >= 0 do
    local start = math.max(0, stop - SLICE + 1)
    local entries = call('LRANGE', list, start, stop)
    for index = #entries, 1, -1 do
      local id = identity(entries[index])
      if not seen[id] then
        seen[id] = true
        kept[#kept + 1] = entries[index]
      end
    end
    stop = start - 1
  end
  scanned = scanned + length
  return kept
end
