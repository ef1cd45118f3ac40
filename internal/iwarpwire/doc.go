// Package iwarpwire encodes and decodes the headers of iWARP: MPA (RFC 5044,
// RFC 6581), DDP (RFC 5041) and RDMAP (RFC 5040).
//
// On a TCP stream each side first sends one [Start] frame, then FPDUs. An FPDU is
//
//	ULPDU length (2) | ULPDU | pad (0..3) | CRC (4)
//
// and its ULPDU is one DDP segment: a [Header], then payload. The payload of a
// Read Request is a [ReadReq], that of a Terminate a [TermMsg]. Everything is
// big-endian but the CRC, which is little-endian.
//
// The package does no I/O, takes no locks and keeps no state. Its functions may be called
// by many goroutines at once. A value of its types is for one goroutine at a time. What is
// used for each segment ([Header], [ReadReq], the CRC) allocates nothing.
package iwarpwire
