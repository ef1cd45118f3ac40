package iwarpwire

import "encoding/binary"

// ReadReqLen is the length of a ReadReq in bytes.
const ReadReqLen = 28

// ReadReq is the RDMAP header of an RDMA Read Request. It is the whole payload of the
// request's only segment. The sink is a buffer of the sender, and the source is one of the
// receiver.
type ReadReq struct {
	SinkSTag uint32
	SinkTO   uint64
	Size     uint32 // Size is the number of bytes to read.
	SrcSTag  uint32
	SrcTO    uint64
}

// Put writes the request to the start of b, and returns ReadReqLen. It panics if b is
// shorter.
func (r *ReadReq) Put(b []byte) int {
	_ = b[ReadReqLen-1]
	binary.BigEndian.PutUint32(b[0:], r.SinkSTag)
	binary.BigEndian.PutUint64(b[4:], r.SinkTO)
	binary.BigEndian.PutUint32(b[12:], r.Size)
	binary.BigEndian.PutUint32(b[16:], r.SrcSTag)
	binary.BigEndian.PutUint64(b[20:], r.SrcTO)
	return ReadReqLen
}

// Parse decodes the request from b, the payload of a Read Request segment. If the length of
// b is not ReadReqLen, it returns the error to terminate the stream with, and does not
// change r. The error is ErrTooLong. If b is too short, it is ErrCatastrophic, because that
// case has no code of its own.
func (r *ReadReq) Parse(b []byte) *TermError {
	if len(b) > ReadReqLen {
		return ErrTooLong
	}
	if len(b) < ReadReqLen {
		return ErrCatastrophic
	}
	*r = ReadReq{
		SinkSTag: binary.BigEndian.Uint32(b[0:]),
		SinkTO:   binary.BigEndian.Uint64(b[4:]),
		Size:     binary.BigEndian.Uint32(b[12:]),
		SrcSTag:  binary.BigEndian.Uint32(b[16:]),
		SrcTO:    binary.BigEndian.Uint64(b[20:]),
	}
	return nil
}
