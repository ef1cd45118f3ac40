package ibv

import "fmt"

// WC is a work completion, after struct ibv_wc. Unless Status is [WCSuccess]
// only ID, Status, VendorErr and QPN mean anything.
type WC struct {
	ID        uint64
	Status    WCStatus
	Op        WCOpcode
	Flags     WCFlags
	VendorErr uint32 // the device's own code for a failure
	QPN       uint32
	ByteLen   uint32 // bytes received or read
	Imm       uint32 // valid with WCWithImm
	InvKey    uint32 // valid with WCWithInv: the key that the peer took back

	// Of a received datagram: the peer's queue pair, and what InfiniBand's own
	// switches go by, for [PD.CreateAHFromWC].
	SrcQP        uint32
	SLID         uint16
	SL           uint8
	DLIDPathBits uint8
}

// WCOpcode is what was completed, after enum ibv_wc_opcode.
type WCOpcode uint8

// The completed operations.
const (
	WCSend WCOpcode = iota
	WCWrite
	WCRead
	WCCmpSwap
	WCFetchAdd
	WCLocalInv
	WCRecv
	WCRecvWriteImm
)

// String returns the operation's name in lower case.
func (o WCOpcode) String() string {
	names := [...]string{"send", "write", "read", "compare and swap", "fetch and add", "local invalidate",
		"receive", "receive of write with immediate"}
	if int(o) < len(names) {
		return names[o]
	}
	return "unknown"
}

// IsRecv reports whether a receive was completed, not a send-queue request.
func (o WCOpcode) IsRecv() bool { return o >= WCRecv }

// WCFlags say which fields of a completion are valid.
type WCFlags uint8

// The flags.
const (
	WCWithImm WCFlags = 1 << iota
	WCWithInv
	WCGRH // a header is in front of the datagram, see [GRHLen]
)

// WCStatus is how a work request ended, after enum ibv_wc_status; the values
// are those of the C header. The statuses that failed are errors.
type WCStatus uint8

// The statuses; ibv_poll_cq(3) and the InfiniBand architecture, volume 1,
// section 11.6.2 say when each occurs.
const (
	WCSuccess WCStatus = iota
	WCLocLenErr
	WCLocQPOpErr
	WCLocEECOpErr
	WCLocProtErr
	WCFlushErr
	WCMWBindErr
	WCBadRespErr
	WCLocAccessErr
	WCRemInvReqErr
	WCRemAccessErr
	WCRemOpErr
	WCRetryExcErr
	WCRNRRetryExcErr
	WCLocRDDViolErr
	WCRemInvRDReqErr
	WCRemAbortErr
	WCInvEECNErr
	WCInvEECStateErr
	WCFatalErr
	WCRespTimeoutErr
	WCGeneralErr
)

var wcStatusNames = [...]string{
	WCSuccess:        "success",
	WCLocLenErr:      "local length error",
	WCLocQPOpErr:     "local QP operation error",
	WCLocEECOpErr:    "local EE context operation error",
	WCLocProtErr:     "local protection error",
	WCFlushErr:       "work request flushed error",
	WCMWBindErr:      "memory window bind error",
	WCBadRespErr:     "bad response error",
	WCLocAccessErr:   "local access error",
	WCRemInvReqErr:   "remote invalid request error",
	WCRemAccessErr:   "remote access error",
	WCRemOpErr:       "remote operation error",
	WCRetryExcErr:    "transport retry counter exceeded",
	WCRNRRetryExcErr: "RNR retry counter exceeded",
	WCLocRDDViolErr:  "local RDD violation error",
	WCRemInvRDReqErr: "remote invalid RD request",
	WCRemAbortErr:    "remote aborted error",
	WCInvEECNErr:     "invalid EE context number",
	WCInvEECStateErr: "invalid EE context state",
	WCFatalErr:       "fatal error",
	WCRespTimeoutErr: "response timeout error",
	WCGeneralErr:     "general error",
}

// String returns the name that ibv_wc_status_str(3) documents for the status.
func (s WCStatus) String() string {
	if int(s) < len(wcStatusNames) {
		return wcStatusNames[s]
	}
	return fmt.Sprintf("status %d", uint8(s))
}

// Error makes the statuses usable with errors.Is.
func (s WCStatus) Error() string { return s.String() }

// WCError is a completion that failed, as an error. It matches its Status
// under errors.Is.
type WCError struct {
	Status    WCStatus
	Op        WCOpcode
	ID        uint64
	VendorErr uint32
	Device    string
}

// Error names the operation, the status, the vendor's code and the device.
func (e *WCError) Error() string {
	return fmt.Sprintf("%s on %s: %s (vendor error %#x, wr %d)", e.Op, e.Device, e.Status, e.VendorErr, e.ID)
}

// Unwrap returns the Status.
func (e *WCError) Unwrap() error { return e.Status }
