package rdmanet

var (
	errMessageSize    = &protocolError{"RemainingDataLength", "message longer than the size negotiated"}
	errDataBeyondRest = &protocolError{"DataLength", "more than the rest of the message"}
	errRemaining      = &protocolError{"RemainingDataLength", "not what is left of the message"}
	errFINInMessage   = &protocolError{"Flags", "FIN before the end of the message"}
	errDataAfterFIN   = &protocolError{"DataLength", "payload after FIN"}
	errEmptyFlag      = &protocolError{"Flags", "an empty message with payload"}
	errMessageFlags   = &protocolError{"Flags", "not those that the message began with"}
	errMessageInside  = &protocolError{"Flags", "a message inside one of the other kind"}
)

// reassembler finds where a message of the upper layer ends and the next one begins in the
// Data Transfer messages received. It holds no data: payload is handed on as it arrives
// (delivery.go). It does no I/O and takes no lock.
type reassembler struct {
	// max is the length of the longest message that this side accepts, the
	// MaxFragmentedRecvSize of [MS-SMBD].
	max uint32

	fin bool // fin is set if featureFIN was agreed, so that flagFIN counts.

	// messages is set if featureMessages was agreed, so that its flags count.
	messages bool

	// remaining is the FragmentReassemblyRemaining of [MS-SMBD], 0 between messages.
	remaining uint32

	// rest is how many bytes of a message that comes by transfers follow the last transfer.
	rest uint64

	// cuts is set if a message may be cut by FIN, and cut if one was.
	cuts, cut bool

	ended bool // ended is set when flagFIN has arrived: no payload may follow.

	// flags has flagExpedited and flagPartial of the message under way, or else of the last
	// one.
	flags uint16

	// before has flagExpedited and flagPartial of the message before the last one that came
	// by transfers.
	before uint16
}

// open reports whether the last message was a piece that is not the last of its message.
func (r *reassembler) open() bool { return r.flags&flagPartial != 0 }

// flagged checks the flags of a segment, and returns those that belong to its message.
// first is set if the segment begins the message. A message in pieces must end before a
// message of the other kind begins.
func (r *reassembler) flagged(h *segmentHeader, first bool) (uint16, error) {
	if !r.messages {
		return 0, nil
	}
	flags := h.Flags & (flagExpedited | flagPartial)
	switch {
	case !first && flags != r.flags:
		return 0, errMessageFlags
	case first && r.open() && (flags^r.flags)&flagExpedited != 0:
		return 0, errMessageInside
	}
	return flags, nil
}

// accept takes the next segment, in the order of arrival, whose header was parsed before.
// first and last report whether a message begins and ends with it. With an error the state
// is unchanged.
//
// [MS-SMBD] 3.1.5.8 bounds the sum of both lengths, and lets the remainder fall by
// DataLength with each segment. So the announced remainder must be exactly what is left. A
// segment may be empty and announce a remainder, as the text allows: it begins a message,
// or repeats the remainder of the current one.
//
// A message with neither payload nor remainder has only credits, a keep-alive probe or its
// answer, or FIN. It belongs to no message of the upper layer, does not change the
// reassembly, and is neither first nor last. Read literally, the text ends the connection
// over one between two segments, but Linux sends them there. If featureMessages was agreed,
// flagEmpty makes it an empty message.
func (r *reassembler) accept(h *segmentHeader) (first, last bool, err error) {
	sum := uint64(h.DataLength) + uint64(h.Remaining) // The sum cannot overflow.
	if sum > uint64(r.max) {
		return false, false, errMessageSize
	}
	empty := sum == 0
	remaining, flags := r.remaining, r.flags
	if r.messages && h.Flags&flagEmpty != 0 {
		if !empty {
			return false, false, errEmptyFlag
		}
		empty = false
	}
	if !empty {
		if r.ended {
			return false, false, errDataAfterFIN
		}
		if r.rest > 0 {
			return false, false, errTransferRest
		}
		first = remaining == 0
		if !first {
			if h.DataLength > remaining {
				return false, false, errDataBeyondRest
			}
			if h.Remaining != remaining-h.DataLength {
				return false, false, errRemaining
			}
		}
		remaining = h.Remaining
		if flags, err = r.flagged(h, first); err != nil {
			return false, false, err
		}
	}
	fin := r.fin && h.Flags&flagFIN != 0
	if fin && (remaining != 0 || r.rest > 0 || flags&flagPartial != 0) {
		if !r.cuts {
			return false, false, errFINInMessage
		}
		r.cut = true
	}
	r.ended = r.ended || fin
	r.remaining, r.flags = remaining, flags
	return first, !empty && remaining == 0, nil
}

// acceptTransfer is accept for an offer or a request, which stands for its payload and for
// the data of its transfer. A message that begins with an offer or a request continues with
// such.
func (r *reassembler) acceptTransfer(h *segmentHeader, t *transferHeader) (first, last bool, err error) {
	sum := uint64(h.DataLength) + uint64(t.Length) + t.Rest // The sum cannot overflow.
	switch {
	case r.ended:
		return false, false, errDataAfterFIN
	case r.fin && h.Flags&flagFIN != 0:
		return false, false, errFINInMessage
	case r.messages && h.Flags&flagEmpty != 0:
		return false, false, errEmptyFlag
	case r.remaining > 0 || r.rest > 0 && r.rest != sum:
		return false, false, errTransferRest
	}
	first = r.rest == 0
	flags, err := r.flagged(h, first)
	if err != nil {
		return false, false, err
	}
	if first {
		r.before = r.flags
	}
	r.rest, r.flags = t.Rest, flags
	return first, t.Rest == 0, nil
}

// undo removes a message whose first transfer was withdrawn as a whole and of which nothing
// else has arrived.
func (r *reassembler) undo() { r.rest, r.flags = 0, r.before }
