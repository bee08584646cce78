-- lists: write lists of entries, SLICE at once, since `unpack` can take no more than 7,999.

-- Prepend `kept` (newest first) to a list.
local function push_front(list, kept)
  for first = 1, #kept, SLICE do
    call('LPUSH', list, unpack(kept, first, math.min(#kept, first + SLICE - 1)))
  end
end

-- Make the first `length` of `kept` (newest first) all that a list holds, for `lifetime` milliseconds.
local function rewrite(list, kept, length, lifetime)
  call('UNLINK', list)
  for first = length, 1, -SLICE do
    local slice = {}
    for index = first, math.max(1, first - SLICE + 1), -1 do
      slice[#slice + 1] = kept[index]
    end
    call('RPUSH', list, unpack(slice))
  end
  if length > 0 then
    call('PEXPIRE', list, lifetime)
  end
end
