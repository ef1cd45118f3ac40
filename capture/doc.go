// Package capture finds the messages of RDMA in captured packets.
//
// A [Reassembler] is given packets, from a file or as they arrive. It calls back for every
// operation of RDMA in them: Sends, Writes, Reads with their answers, and atomic
// operations. It decodes RoCEv2 and iWARP, and compares the checksums of both. It finds the
// two directions of a connection by the connection's set-up. If the set-up was not
// captured, it finds them by the answers, which fit the requests of one direction only.
//
// Above RDMA it follows SMB Direct, rdmanet's own streams, which are SMB Direct with
// extensions, and RPC-over-RDMA. It puts together messages of many Sends. Data that was
// moved by RDMA Write or Read is put in its place.
//
//	r := capture.NewReassembler(capture.Config{
//		Message: func(m *capture.Message) { fmt.Println(m.Time, m.Conn, m.Kind, m.Size, m.Complete) },
//		Loss:    func(l capture.Loss) { fmt.Println(l) },
//	})
//	for packets.Next() {
//		r.Add(&capture.Packet{Time: ..., Link: capture.LinkEthernet, Data: ...})
//	}
//	r.Flush()
//
// # What is right and what is missing
//
// Packets may come out of order, several times, or not at all. A message is called complete
// only if every byte of it was captured. What is missing is reported: for a message as
// ranges of its bytes, for a connection as a [Loss] with PSNs or offsets in the TCP stream.
// If packets are missing, it may be impossible to decide what other packets belong to.
// These are not used then.
//
// # Memory
//
// [Config] bounds the memory: the bytes of packets that wait and of incomplete messages,
// and the number of connections. Without Config.Data only the beginning of each Send is
// kept. A packet of RoCEv2 then costs no allocation, once the memory that is used again has
// its size.
//
// # Segments
//
// [Segments], [Segment], [SubSegment] and [ReadRequest] put together memory that was
// written or read by several operations. They can be used by themselves.
package capture
