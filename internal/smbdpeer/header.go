package smbdpeer

import (
	"encoding/binary"
	"fmt"
)

// A Header is what a Data Transfer message begins with, [MS-SMBD] 2.2.3.
type Header struct {
	CreditsRequested uint16
	CreditsGranted   uint16
	Flags            uint16
	Remaining        uint32
	DataOffset       uint32
	DataLength       uint32
}

// Append appends the header, and padding up to DataOffset if there is a payload.
func (h Header) Append(b []byte) []byte {
	le := binary.LittleEndian
	start := len(b)
	b = le.AppendUint16(b, h.CreditsRequested)
	b = le.AppendUint16(b, h.CreditsGranted)
	b = le.AppendUint16(b, h.Flags)
	b = le.AppendUint16(b, 0)
	b = le.AppendUint32(b, h.Remaining)
	b = le.AppendUint32(b, h.DataOffset)
	b = le.AppendUint32(b, h.DataLength)
	for h.DataLength > 0 && len(b)-start < int(h.DataOffset) {
		b = append(b, 0)
	}
	return b
}

func parse(b []byte) (h Header, payload []byte, err error) {
	if len(b) < headerLen {
		return h, nil, fmt.Errorf("smbdpeer: a message of %d bytes", len(b))
	}
	le := binary.LittleEndian
	h = Header{le.Uint16(b), le.Uint16(b[2:]), le.Uint16(b[4:]), le.Uint32(b[8:]), le.Uint32(b[12:]), le.Uint32(b[16:])}
	end := uint64(h.DataOffset) + uint64(h.DataLength)
	if h.CreditsRequested == 0 || h.DataOffset%8 != 0 || end > uint64(len(b)) || h.DataLength > 0 && h.DataOffset < headerLen {
		return h, nil, fmt.Errorf("smbdpeer: malformed header %+v in %d bytes", h, len(b))
	}
	return h, b[h.DataOffset:end], nil
}
