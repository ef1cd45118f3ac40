package iwarpwire

// Two software devices on one host may go on through shared memory. They tell each other by
// a trailer of the private data, which is not in any RFC: a Request has an offer and its
// Reply an answer, behind the private data of the program. Peers without it see private
// data that is longer. The layouts are
//
//	offer:  host (16 bytes)            flags (1) version (1) magic (4)
//	answer: name (16)      token (16)  flags (1) version (1) magic (4)
//
// so that both are found from the end.

const (
	sameHostMagic   = "RDSH"
	sameHostVersion = 1
	sameHostTail    = 1 + 1 + len(sameHostMagic)

	// SameHostOfferLen and SameHostAnswerLen are the lengths of the trailers in bytes.
	SameHostOfferLen  = 16 + sameHostTail
	SameHostAnswerLen = 16 + 16 + sameHostTail

	sameHostNow = 1 // sameHostNow is the bit of Now in flags.
)

// A SameHostOffer is the trailer of a Request.
type SameHostOffer struct {
	// Host is the same for all processes that may share memory with the sender.
	Host [16]byte

	// Now is set if the sender wants no byte behind the Start frames to go by TCP.
	Now bool
}

// A SameHostAnswer is the trailer of a Reply that accepts an offer.
type SameHostAnswer struct {
	// Name is where the sender of the offer finds the other end: a socket in the abstract
	// name space of Unix sockets.
	Name [16]byte

	// Token shows that a connection to that socket belongs to this connection.
	Token [16]byte

	// Now is as in the offer.
	Now bool
}

// Append appends the trailer to the private data of the program.
func (o *SameHostOffer) Append(private []byte) []byte {
	return appendSameHostTail(append(private, o.Host[:]...), o.Now)
}

// Append appends the trailer to the private data of the program.
func (a *SameHostAnswer) Append(private []byte) []byte {
	return appendSameHostTail(append(append(private, a.Name[:]...), a.Token[:]...), a.Now)
}

func appendSameHostTail(b []byte, now bool) []byte {
	flags := byte(0)
	if now {
		flags = sameHostNow
	}
	return append(append(b, flags, sameHostVersion), sameHostMagic...)
}

// CutSameHostOffer returns the private data of the program, and the offer behind it if
// there is one.
func CutSameHostOffer(b []byte) (private []byte, o SameHostOffer, ok bool) {
	private, body, now := cutSameHost(b, SameHostOfferLen)
	if body == nil {
		return b, o, false
	}
	copy(o.Host[:], body)
	o.Now = now
	return private, o, true
}

// CutSameHostAnswer returns the private data of the program, and the answer behind it if
// there is one.
func CutSameHostAnswer(b []byte) (private []byte, a SameHostAnswer, ok bool) {
	private, body, now := cutSameHost(b, SameHostAnswerLen)
	if body == nil {
		return b, a, false
	}
	copy(a.Name[:], body)
	copy(a.Token[:], body[16:])
	a.Now = now
	return private, a, true
}

// cutSameHost divides b in front of a trailer of n bytes. body is nil if there is none, or
// one of another version.
func cutSameHost(b []byte, n int) (private, body []byte, now bool) {
	at := len(b) - n
	if at < 0 || string(b[len(b)-len(sameHostMagic):]) != sameHostMagic || b[len(b)-len(sameHostMagic)-1] != sameHostVersion {
		return nil, nil, false
	}
	return b[:at:at], b[at:], b[len(b)-sameHostTail]&sameHostNow != 0
}
